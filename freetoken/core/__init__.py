"""The ground floor: facts, wishes, words and contracts that every other room shares.

Knows no mechanism: only `batch` and `interfaces` may name torch types.
"""
