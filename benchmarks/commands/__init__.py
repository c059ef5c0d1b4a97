"""The rows of bench_commands.py: whole training commands, ours and those of others."""
