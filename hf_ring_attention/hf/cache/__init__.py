"""What later tokens still see."""
