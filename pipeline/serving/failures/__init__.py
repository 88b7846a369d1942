"""Known failures as data: what a log says, when it means that, the cause, the mend, and where that is known from."""
