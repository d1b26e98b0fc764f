"""How fragments move between live parameters and host bytes, one file per kind of device."""
