"""The same functions on other people's parts, to compare with and to grow into."""
