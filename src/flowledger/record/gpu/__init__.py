"""What a process's GPU says: memory by stage, time on the device, memory outside of torch, and what lay where when it ran out."""
