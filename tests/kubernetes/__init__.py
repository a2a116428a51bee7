"""Tests of the manifests in examples/kubernetes, without a cluster."""
