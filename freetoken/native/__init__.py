"""Native code beside the package: the C header `abi.h` states the memory that host and device share."""
