// Command csi-registrar keeps every CSI driver of a node registered with its kubelet.
package main

import (
	"os"

	"csi-registrar/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
