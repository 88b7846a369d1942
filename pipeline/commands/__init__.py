"""One module a command: it reads its options, calls the stages, and shows the result."""
