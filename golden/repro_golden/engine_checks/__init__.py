"""Does a rollout engine repeat its bits, and do the trainer's weights arrive in it?"""
