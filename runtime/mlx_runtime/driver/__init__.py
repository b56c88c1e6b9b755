"""One run from the outside: request, plan, driver, record and display."""
