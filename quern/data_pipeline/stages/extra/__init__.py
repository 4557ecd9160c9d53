"""Rules of one's own: stages at the quality gate, from a module that is not quern's."""
