"""One file for each part of Lightning's Trainer that the outer loop touches."""
