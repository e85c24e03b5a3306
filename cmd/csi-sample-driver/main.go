package cli

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"csi-registrar/internal/demo/sampledriver"
)

// setupSampleDriver declares sample-driver, a CSI driver to try things with. It is hidden:
// nobody needs it to run a node. Its name is not checked, so that it can play the driver
// with a name that nobody should accept.
func setupSampleDriver(fs *flag.FlagSet) runner {
	socket := fs.String("socket", "", "serve at the Unix socket `PATH`; required")
	name := fs.String("name", sampledriver.DefaultName, "the `NAME` that GetPluginInfo answers")
	nodeID := fs.String("node-id", "", "the `ID` that NodeGetInfo answers (default: the host's name)")
	data := fs.String("data", "", "keep the volumes below the folder `DIR` (default: volumes, beside the socket)")
	topology := fs.String("topology", "", "topology of the node, `KEY=VALUE,...`")
	maxVolumes := fs.Int64("max-volumes", 0, "how many volumes the node can take, `N`; 0: no limit")
	return func(ctx context.Context, e *env, args []string) error {
		if err := noArgs(args); err != nil {
			return err
		}
		if *socket == "" {
			return usagef(nil, "--socket is missing")
		}
		if *maxVolumes < 0 {
			return usagef(nil, "--max-volumes %d is negative", *maxVolumes)
		}
		segments, err := parseTopology(*topology)
		if err != nil {
			return err
		}
		if *nodeID == "" {
			if *nodeID, err = os.Hostname(); err != nil {
				return hinted(fmt.Errorf("cannot find out the host's name: %w", err), "give --node-id")
			}
		}
		if *data == "" {
			*data = filepath.Join(filepath.Dir(*socket), "volumes")
		}
		if *data, err = filepath.Abs(*data); err != nil {
			return fmt.Errorf("cannot make %s an absolute path: %w", *data, err)
		}
		driver := &sampledriver.Driver{
			Name:       *name,
			Version:    build().Version,
			NodeID:     *nodeID,
			Topology:   segments,
			MaxVolumes: *maxVolumes,
			Data:       *data,
			Log:        slog.New(slog.NewTextHandler(e.stderr, nil)),
		}
		return driver.Serve(ctx, *socket)
	}
}

func parseTopology(text string) (map[string]string, error) {
	segments := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, usagef(nil, "--topology %q is not a list of KEY=VALUE", text)
		}
		segments[key] = value
	}
	return segments, nil
}
