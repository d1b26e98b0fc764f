"""One final class for each way in which Lightning spreads a model over devices."""
