"""The `mindspeed-mm` command; one file a sub-command."""
