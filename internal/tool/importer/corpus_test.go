package importer

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
)

// TestCorpus imports every manifest below the directory of $CORPUS, each by itself, and prints a
// table of what came out. It checks what can be checked without knowing the drivers; whether a name
// is right, and whether a hint helps, must be read. `make corpus-test` runs it.
func TestCorpus(t *testing.T) {
	root := os.Getenv("CORPUS")
	if root == "" {
		t.Skip("CORPUS is not set to a directory of manifests")
	}
	var files []string
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if ext := filepath.Ext(file); err == nil && !d.IsDir() && (ext == ".yaml" || ext == ".yml" || ext == ".json") {
			files = append(files, file)
		}
		return err
	})
	if err != nil || len(files) == 0 {
		t.Fatalf("%d manifests in %s, %v", len(files), root, err)
	}
	var whole, partly, refused, slowest, total = 0, 0, 0, time.Duration(0), time.Duration(0)
	drivers := map[string]bool{}
	for _, file := range files {
		name, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			m := File{Name: filepath.Base(file), Data: data}
			start := time.Now()
			res := Import([]File{m}, nil)
			took := time.Since(start)
			slowest, total = max(slowest, took), total+took
			if len(res.Registrars) > 0 {
				checkLoads(t, res.Registrars, DropIn(res.Registrars, res.Edits))
				checkApplied(t, m, res)
			}
			result := "refused"
			switch {
			case len(res.Refused) == 0:
				whole++
				result = "imported"
			case len(res.Registrars) > 0:
				partly++
				result = "partly"
			default:
				refused++
			}
			fmt.Printf("%-8s %5.1f ms  %s\n", result, float64(took.Microseconds())/1000, name)
			for _, r := range res.Registrars {
				drivers[r.Driver.Name] = true
				fmt.Printf("    %s  socket %s", r.Driver.Name, r.Driver.Socket)
				d := config.DefaultDriver(r.Driver.Name, r.Driver.Socket)
				if r.Driver.Endpoint != d.Endpoint {
					fmt.Printf("  endpoint %s", r.Driver.Endpoint)
				}
				if r.Driver.Timeout != d.Timeout {
					fmt.Printf("  timeout %v", r.Driver.Timeout)
				}
				if r.Driver.SocketOwner != d.SocketOwner {
					fmt.Printf("  socket_owner %s", r.Driver.SocketOwner)
				}
				if r.RootDir != config.Default().Kubelet.RootDir {
					fmt.Printf("  root_dir %s", r.RootDir)
				}
				fmt.Println()
				for _, c := range r.Comments {
					fmt.Printf("        # %s\n", c)
				}
			}
			for _, e := range res.Edits {
				fmt.Printf("    %s\n        %s\n", e.Workload, strings.Join(e.Lines(), "\n        "))
			}
			for _, r := range res.Refused {
				fmt.Printf("    error: %s: %s\n        hint: %s\n", r.Where, r.Reason, r.Hint)
			}
		})
	}
	names := slices.Sorted(maps.Keys(drivers))
	fmt.Printf("\n%d manifests: %d imported, %d partly, %d refused; %d drivers; %v in all, the slowest %v\n%s\n",
		len(files), whole, partly, refused, len(names), total.Round(time.Millisecond), slowest.Round(time.Microsecond), strings.Join(names, "\n"))
}
