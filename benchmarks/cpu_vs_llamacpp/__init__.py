"""Decode and prefill on the CPU beside llama.cpp."""

from freetoken.core import env

env.let_openmp_sleep()  # as `ft` does, before torch is there
