"""The Lightning strategy: one set of hooks, thin final classes, late binding of the bare name."""
