"""How a script is started on many processes: settings, where they come from, and the processes."""
