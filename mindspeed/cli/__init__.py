"""The command line: one file per sub-command, found by `mindspeed.cli.main`."""
