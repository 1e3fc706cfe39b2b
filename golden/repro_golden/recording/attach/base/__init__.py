"""What all rooms of the recorder share: settings, guards, what is known of objects, and which steps are made."""
