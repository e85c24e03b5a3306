// Command upstream replaces the drivers of packaging/examples where they are not available: it
// accepts their flags and executes the sample driver under the driver name by which it was called.
// The sample driver mounts without other programs, so an image of the two needs nothing else.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

func main() {
	const driver = "/usr/bin/csi-sample-driver"
	program := filepath.Base(os.Args[0])
	endpoint := flag.String("endpoint", "", "`unix://PATH`")
	nodeID := flag.String("nodeid", "", "the node's `ID`")
	data := flag.String("statedir", "/var/lib/volumes", "keep the volumes in `DIR`")
	flag.Parse()
	err := syscall.Exec(driver, []string{
		program,
		"--name", strings.TrimSuffix(program, "plugin") + ".csi.k8s.io",
		"--socket", strings.TrimPrefix(*endpoint, "unix://"),
		"--node-id", *nodeID,
		"--data", filepath.Join(*data, program),
	}, os.Environ())
	fmt.Fprintf(os.Stderr, "cannot run %s: %v\n", driver, err)
	os.Exit(1)
}
