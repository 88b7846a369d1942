"""A tiny model and a small hub on this machine, for `duopack demo` and the tests."""
