"""One GPU to Many: the library behind the course, one module a topic."""
