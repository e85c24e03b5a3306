package kubelet

func isolated(what string) int { return 2 }
