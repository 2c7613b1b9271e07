{{- /* The only place that computes sizes. Everything else reads "kvferry.sizes". */ -}}

{{- /* Bytes of a quantity. Takes (key, value); fails with the key's name. */ -}}
{{- define "kvferry.bytes" -}}
{{- $text := toString .value -}}
{{- if not (regexMatch "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$" $text) -}}
{{- fail (printf "%s: %q is no size; write a whole number and a unit, for example 16Gi" .key $text) -}}
{{- end -}}
{{- $factors := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $factors (regexFind "[A-Za-z]*$" $text)) -}}
{{- end }}

{{- define "kvferry.mebibytes" -}}
{{- div (add (include "kvferry.bytes" . | int64) 1048575) 1048576 -}}
{{- end }}

{{- /* Ranks of one engine pod: a GPU each. */ -}}
{{- define "kvferry.ranks" -}}
{{- $ranks := mul (int64 .Values.engine.tensorParallelSize) (int64 .Values.engine.pipelineParallelSize) -}}
{{- if mod $ranks (int64 .Values.engine.nodes) -}}
{{- fail (printf "engine.nodes is %d, which does not divide the engine's %d ranks (tensorParallelSize times pipelineParallelSize): each pod has as many" (int64 .Values.engine.nodes) $ranks) -}}
{{- end -}}
{{- div $ranks (int64 .Values.engine.nodes) -}}
{{- end }}

{{- define "kvferry.sizes" -}}
{{- $pool := include "kvferry.mebibytes" (dict "key" "pool.size" "value" .Values.pool.size) | int64 -}}
{{- /* The segment is the pool and its index: of 64 bytes a key 48 are there and 16 in the process. By
default they are 1/256 of the pool: four times that, so that small pools and rounding fit, and the 16. */ -}}
{{- $index := add (div $pool 64) (div (mul (int64 .Values.pool.keysMax) 128) 1048576) 64 -}}
{{- $shm := add $pool $index -}}
{{- $overhead := include "kvferry.mebibytes" (dict "key" "sidecar.memoryOverhead" "value" .Values.sidecar.memoryOverhead) | int64 -}}
{{- $segment := 0 -}}
{{- with .Values.remote.mooncake.segmentSize -}}
{{- $segment = include "kvferry.mebibytes" (dict "key" "remote.mooncake.segmentSize" "value" .) | int64 -}}
{{- end -}}
{{- /* Huge pages come whole and count apart; only the index in the process stays memory. */ -}}
{{- $poolMemory := $shm -}}
{{- $huge := 0 -}}
{{- with .Values.pool.hugepages -}}
{{- $page := include "kvferry.mebibytes" (dict "key" "pool.hugepages" "value" .) | int64 -}}
{{- $huge = mul $page (div (add $shm (sub $page 1)) $page) -}}
{{- $poolMemory = $index -}}
{{- end -}}
{{- $memory := add $poolMemory $overhead $segment -}}
{{- if .Values.sidecar.memory -}}
{{- $own := include "kvferry.mebibytes" (dict "key" "sidecar.memory" "value" .Values.sidecar.memory) | int64 -}}
{{- if lt $own $memory -}}
{{- fail (printf "sidecar.memory is %dMi, but the pool with its index takes %dMi, the store's segment %dMi and the sidecar itself %dMi: raise sidecar.memory to at least %dMi (or leave it empty), or lower pool.size" $own $poolMemory $segment $overhead $memory) -}}
{{- end -}}
{{- $memory = $own -}}
{{- end -}}
{{- $engineShm := add 1024 (mul 2048 (include "kvferry.ranks" . | int64)) -}}
{{- with .Values.engine.shmSize -}}
{{- $engineShm = include "kvferry.mebibytes" (dict "key" "engine.shmSize" "value" .) | int64 -}}
{{- if lt $engineShm 256 -}}
{{- fail (printf "engine.shmSize is %dMi, and vLLM asks for 160Mi before it starts: raise it to at least 256Mi, or leave it empty" $engineShm) -}}
{{- end -}}
{{- end -}}
{{- $engineMin := $engineShm -}}
{{- if eq .Values.gpu.access "none" -}}
{{- $engineMin = add $engineMin (mul 1024 (mul (int64 .Values.engine.cpuKvCacheGiB) (include "kvferry.ranks" . | int64))) -}}
{{- end -}}
{{- with (.Values.engine.resources.limits | default dict).memory -}}
{{- $limit := include "kvferry.mebibytes" (dict "key" "engine.resources.limits.memory" "value" .) | int64 -}}
{{- if lt $limit $engineMin -}}
{{- fail (printf "engine.resources.limits.memory is %dMi, but its /dev/shm and CPU KV cache may take %dMi: raise the limit above that plus the weights, or lower engine.shmSize or engine.cpuKvCacheGiB" $limit $engineMin) -}}
{{- end -}}
{{- with ($.Values.engine.resources.requests | default dict).memory -}}
{{- if lt $limit (include "kvferry.mebibytes" (dict "key" "engine.resources.requests.memory" "value" .) | int64) -}}
{{- fail "engine.resources.requests.memory is above engine.resources.limits.memory: raise the limit" -}}
{{- end -}}
{{- end -}}
{{- end -}}
poolMi: {{ $pool }}
segmentMi: {{ $segment }}
shmMi: {{ $shm }}
memoryMi: {{ $memory }}
hugepagesMi: {{ $huge }}
engineShmMi: {{ $engineShm }}
engineMinMi: {{ $engineMin }}
{{- /* The whole pool is written once before the sockets open: 5 s a GiB is slow memory. */}}
startupSeconds: {{ add 60 (mul 5 (div $pool 1024)) }}
{{- /* A sidecar is stopped after the engine, within the same grace period. */}}
engineGraceSeconds: {{ add (int64 .Values.engine.preStopSleepSeconds) (int64 .Values.engine.shutdownTimeoutSeconds) 5 }}
podGraceSeconds: {{ add (int64 .Values.engine.preStopSleepSeconds) (int64 .Values.engine.shutdownTimeoutSeconds) (int64 .Values.sidecar.drainSeconds) 6 }}
sidecarGraceSeconds: {{ add (int64 .Values.sidecar.drainSeconds) 6 }}
{{- end }}
