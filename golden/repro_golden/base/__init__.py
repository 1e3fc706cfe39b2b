"""What everything rests on: errors, canonical bytes, processes, disks. Knows no case and no tensor."""
