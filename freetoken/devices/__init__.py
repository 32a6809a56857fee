"""Places to compute. One file each; `create(options)` opens it.

cpu    host memory and wall time; also the plain truth for tests
sim    the CPU with a memory limit and a virtual clock for link, host and GPU
"""
