"""What every service needs: start and stop, health, reflection, errors, the model thread."""
