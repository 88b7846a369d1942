"""The arguments of every command, by subject; light, since each start of duopack reads all of them."""
