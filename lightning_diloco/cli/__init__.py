"""The command line. Each verb has one file, which parses, calls and prints."""
