"""Worker processes of loaders."""
