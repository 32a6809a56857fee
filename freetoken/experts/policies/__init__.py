"""Which experts stay on the GPU. One file, one policy; integers only, torch never.

Every file names its class `POLICY`. A policy doesn't know slots, bytes or streams: it is told what was
routed, says which residents are coldest and which misses are most worth filling. The device kernel of
the same name computes the same integers.
"""
