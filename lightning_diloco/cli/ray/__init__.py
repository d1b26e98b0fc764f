"""`diloco run --engine ray`: Ray places the processes of a run; the run itself does not need Ray."""
