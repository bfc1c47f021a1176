"""The processes of a launch: started, watched and ended."""
