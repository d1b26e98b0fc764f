"""The command line. Each verb has one module, which parses the options, calls the package and prints the result."""
