// Command csi-sample-driver is a small CSI driver for trying out csi-registrar, and an example for
// packagers of drivers. Its volumes are directories of the node.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"csi-registrar/internal/test/sampledriver"
)

// version is set by the linker.
var version = "devel"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// run serves until ctx is done. The name is not checked, so that tests can use an invalid one.
func run(ctx context.Context, args []string) error {
	d := sampledriver.Driver{Version: version, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	fs := flag.NewFlagSet("csi-sample-driver", flag.ContinueOnError)
	socket := fs.String("socket", "", "serve at the Unix socket `PATH`; required")
	fs.StringVar(&d.Name, "name", sampledriver.DefaultName, "the `NAME` that GetPluginInfo answers")
	fs.StringVar(&d.NodeID, "node-id", "", "the `ID` that NodeGetInfo answers (default: the host's name)")
	fs.StringVar(&d.Data, "data", "", "keep the volumes below the directory `DIR` (default: volumes, beside the socket)")
	fs.StringVar(&d.RootDir, "root-dir", "/var/lib/kubelet", "mount volumes only below pods and plugins of the kubelet's root directory `DIR`")
	topology := fs.String("topology", "", "topology of the node, `KEY=VALUE,...`")
	fs.Int64Var(&d.MaxVolumes, "max-volumes", 0, "how many volumes the node can take, `N`; 0: no limit")
	showVersion := fs.Bool("version", false, "print the version")
	if err := fs.Parse(args); err != nil {
		return err
	}
	switch {
	case *showVersion:
		_, err := fmt.Println("csi-sample-driver", version)
		return err
	case fs.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	case *socket == "":
		return errors.New("--socket is missing")
	case d.MaxVolumes < 0:
		return fmt.Errorf("--max-volumes %d is negative", d.MaxVolumes)
	}
	var err error
	if d.Topology, err = parseTopology(*topology); err != nil {
		return err
	}
	if d.NodeID == "" {
		if d.NodeID, err = os.Hostname(); err != nil {
			return fmt.Errorf("cannot get the host's name: %w; use --node-id", err)
		}
	}
	if d.Data == "" {
		d.Data = filepath.Join(filepath.Dir(*socket), "volumes")
	}
	if d.Data, err = filepath.Abs(d.Data); err != nil {
		return fmt.Errorf("cannot make --data absolute: %w", err)
	}
	if d.RootDir, err = filepath.Abs(d.RootDir); err != nil {
		return fmt.Errorf("cannot make --root-dir absolute: %w", err)
	}
	return d.Serve(ctx, *socket)
}

// parseTopology parses KEY=VALUE,...; an empty text means no topology.
func parseTopology(text string) (map[string]string, error) {
	segments := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("--topology %q is not a list of KEY=VALUE", text)
		}
		segments[key] = value
	}
	return segments, nil
}
