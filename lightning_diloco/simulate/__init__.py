"""An event loop over the real protocol machines, with a made-up network and clock."""
