"""The Lightning strategy: hooks that all devices share, and a final class for each kind of device."""
