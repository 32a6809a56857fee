"""The numbers of the policies and of the list, shared by all makers. Integers only.

two_speed is `experts.policies.two_speed`: averages aged by shifts once a step, raised by a use; victims are
the residents of least fast + slow, those of layers still to come in this step counting half as much again,
and those that lack tiles by their key over 1 + HOLE x the share they lack.
"""

FAST_AGE, FAST_GAIN = 1, 1 << 17
SLOW_AGE, SLOW_GAIN = 4, 1 << 16
AHEAD, HOLE = 1, 16
FLOOR_SHIFT = 4
BUCKETS = 16
ONE = 1 << 16
SEED_TOKENS, SEED_SHIFT = 32, 14
"""Uses in a prompt's last tokens that count as constant use: half of 2^20 for 32 of them."""
