"""Routed experts: records, residency, the split of misses, and the backends that compute them."""
