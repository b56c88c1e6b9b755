"""A page of all runs, and the experiment in the working directory, drawn and composed."""
