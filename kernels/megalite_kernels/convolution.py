import torch, torch.nn.functional as F
def short_convolution(input, weight, bias, segments=None, halos=None, *, silu=True):
    taps = weight.shape[1]
    from megalite_kernels.chunks import Segment
    segments = segments or [Segment(range(len(input)), None)]
    outs = []
    for i, (seg, x) in enumerate(zip(segments, input.split([len(s.tokens) for s in segments]))):
        halo = x.new_zeros(taps - 1, *x.shape[1:]) if halos is None else halos[i]
        whole = torch.cat([halo, x])
        y = 0
        pos = torch.arange(seg.tokens.start, seg.tokens.stop)
        for back in range(taps):
            part = whole[taps - 1 - back : len(whole) - back]
            if seg.first is not None:
                part = part * ((pos - back)[None] >= seg.first).t().unsqueeze(-1)
            y = y + part * weight[:, taps - 1 - back]
        if bias is not None: y = y + bias
        outs.append(F.silu(y) if silu else y)
    return torch.cat(outs).to(input.dtype)
def convolution_step(input, weight, bias, tail, *, silu=True):
    whole = torch.cat([tail, input])
    y = (whole * weight.t().unsqueeze(1)).sum(0, keepdim=True)
    if bias is not None: y = y + bias
    return (F.silu(y) if silu else y).to(input.dtype), whole[1:]
