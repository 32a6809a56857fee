"""Weight formats of expert tiles: one file, one format. `FORMAT` is each file's stateless object."""
