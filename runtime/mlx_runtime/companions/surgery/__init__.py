"""What trains of a model; whether the runs of a project resume exactly, and what is new in its template."""
