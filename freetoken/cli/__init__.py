"""The command line: a command is a file with HELP, add_arguments(parser) and run(args) -> int.

Files that start with an underscore serve commands and are none. Nothing here imports torch, and
nothing heavy is imported before a command runs.
"""
