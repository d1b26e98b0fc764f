"""What a run needs and whether it fits: memory, links, goodput, by formula."""
