"""Recovery within a job: ranks that are started again from warm processes."""
