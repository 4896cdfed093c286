"""Many generations of one model at once: the loop over a scheduler, how its forwards are run, how tokens are chosen."""
