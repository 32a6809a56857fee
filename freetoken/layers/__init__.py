"""Parts that model families share: weights bound to kernels, in normal or exact numerics.

Knows no attention, no experts and no checkpoint names; tensors in, tensors out.
"""
