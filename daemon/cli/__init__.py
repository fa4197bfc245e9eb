"""The command line `everstep`: arguments, tables, and the commands that need no daemon."""
