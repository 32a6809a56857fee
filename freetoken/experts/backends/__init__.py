"""Where routed experts are computed. One file each; `create(setup)` makes the backend.

fused     every expert resident on the device
offload   slots on the device, misses come over the link
cpu       every expert computed by the host executor, in place
hybrid    misses are divided between link and host executor
"""
