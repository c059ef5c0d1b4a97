"""The command line: one file per sub-command, found by `mindspeed_llm.cli.main`."""
