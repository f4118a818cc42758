"""The attention functions alone, in torch: a layer of DIFF V1 and one of DIFF V2.

python examples/kernels.py
"""

import torch
from torch.nn.functional import linear

from diffmegatron.attention import diff_attention, diff_attention_v2

torch.manual_seed(1)
b, s, h, d = 2, 128, 4, 32  # batch, positions, heads, width of a query
hidden = torch.randn(b, s, 2 * h * d)
weight = torch.randn(6 * h * d, 2 * h * d, requires_grad=True)  # q1, q2, k1, k2 and the value of 2d
heads = linear(hidden, weight / (2 * h * d) ** 0.5).view(b, s, h, 6 * d)
q1, q2, k1, k2, v = heads.split([d, d, d, d, 2 * d], dim=-1)

# DIFF V1: (softmax(q1 k1 / sqrt(d)) - lambda softmax(q2 k2 / sqrt(d))) v, causal; lambda per layer.
v1 = diff_attention(q1, k1, q2, k2, v, torch.tensor(0.5))  # [b, s, h, 2d]

# DIFF V2: the heads 2n and 2n + 1 are a signal head and its noise head; lambda per token and head.
pairs = torch.stack([q1, q2], dim=3).flatten(2, 3)  # [b, s, 2h, d]
lambdas = torch.sigmoid(torch.randn(b, s, h))
v2 = diff_attention_v2(pairs, k1, v[..., :d], lambdas)  # [b, s, h, d]

(v1.square().mean() + v2.square().mean()).backward()
assert weight.grad is not None
print(f"V1 {tuple(v1.shape)}, V2 {tuple(v2.shape)}, gradient {weight.grad.norm():.3f}")
